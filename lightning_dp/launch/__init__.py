"""How the processes of a run start, find each other, and end."""
