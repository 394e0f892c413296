"""Which devices a job may use, now and soon."""
