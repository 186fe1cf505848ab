"""Two small trainings on real data, written as any user of Lightning would: they know nothing of us.

``digits``: a convolutional network reads scanned digits. ``bytes``: a small GPT reads Python's library.
"""
