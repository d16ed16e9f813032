"""Reading and writing weights: key maps, strict loading."""
