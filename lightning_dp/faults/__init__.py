"""When a rank fails, is ended or is asked to stop: how the others learn of it and come to an end."""
