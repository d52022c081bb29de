"""Train one run in several processes: rendezvous, signals, watchdog, comparison of replicas."""
