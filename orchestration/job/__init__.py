"""What the scheduler decides, from joining to leaving. Pure: messages and the time go in, messages come out."""
