"""The command line. It prints results on stdout and everything else on stderr, and imports JAX late."""
