"""Who holds which box of which tensor, and what must travel between two holdings."""
