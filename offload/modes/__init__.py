"""One file a mode; a mode says how a model is cut and what moves at the cuts."""
