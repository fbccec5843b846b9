"""What collectives cost: closed forms, the measured fabric's file, and its measurement."""
