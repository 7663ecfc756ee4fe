"""Pure scheduling: requests, budgets, caches. Nothing here touches a model or a socket."""
