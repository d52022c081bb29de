"""What each verb of the command line does. Results go to stdout, everything else to stderr; JAX is imported late."""
