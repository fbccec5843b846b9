"""What acts inside a step: finds its collectives, shares arrivals, delays and gates."""
