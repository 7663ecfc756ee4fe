"""The custom resource definition, generated from the typed spec, and the rules of its changes.

The schema's one source is `epd_operator.api`. What a schema cannot say is said twice: as CEL for API servers
that know it (`rules`), and in Python (`api`'s own validators, and `transitions`) for those that do not.
"""
