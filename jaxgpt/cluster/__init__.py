"""Several processes, one run: rendezvous, signals, watchdog, comparison of replicas."""
