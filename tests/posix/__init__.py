"""The mount as programs see it, in both lanes: each test is a thing that a local disk does too."""
