"""Pure: from the children as they are to what the resource's status says."""
