"""A metrics API of our own: what the pods' /metrics say, as HorizontalPodAutoscalers ask for it."""
