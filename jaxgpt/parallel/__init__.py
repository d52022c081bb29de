"""Where programs meet devices: nothing outside this package names one."""
