"""Collectives: found in the traced step, stamped, and made to carry the ranks' arrivals."""
