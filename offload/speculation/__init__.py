"""Updates inside backward although their gradients may be clipped: made on trial (`trials`) with a log (`undo_log`)."""
