"""What iterations take on real GPUs: tables made from measured kernel times, and a roofline for what has no table."""
