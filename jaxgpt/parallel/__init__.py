"""Train on devices: strategies, shardings, the limits of devices, and the compiled steps of an experiment."""
