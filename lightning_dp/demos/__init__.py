"""Two small trainings on real data, written as any user of Lightning would.

They know nothing of the strategy that runs them. ``digits``: a convolutional network reads scanned
digits. ``bytes``: a small GPT reads the source text of Python's standard library.
"""
