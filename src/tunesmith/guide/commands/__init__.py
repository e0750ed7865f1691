"""Commands that the trainer does not need; they register at the door ``commands`` of ``cli``."""
