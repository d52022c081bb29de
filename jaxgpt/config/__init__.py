"""Check the values of configurations, and read and write them as JSON. Each lies beside what it builds."""
