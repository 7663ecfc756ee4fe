"""The operator: kopf's watches fill a cache, a queue names what to look at, `Reconciler` does it."""
