"""What a step updates: the optimizer's state in shares (ZeRO-1). torch only."""
