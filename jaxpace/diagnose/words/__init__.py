"""What the diagnosis says: codes with their words, names and numbers, advice."""
