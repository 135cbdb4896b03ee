"""Reports about a run directory for people: the page of `report`, the live view of `top`."""
