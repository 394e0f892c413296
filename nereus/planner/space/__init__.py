"""Which plans there are: layouts, counts, settings, and the line of devices they lie on."""
