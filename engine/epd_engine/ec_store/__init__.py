"""The EC store: encoder outputs on a shared volume, found by content.

Engine-neutral: nothing here knows the scheduler, the server or a model family.
"""
