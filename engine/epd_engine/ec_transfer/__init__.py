"""Moving encoder outputs between instances: configuration, connector contract, connectors."""
