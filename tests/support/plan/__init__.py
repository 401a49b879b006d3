"""Made-up measurements, recordings and costs."""
