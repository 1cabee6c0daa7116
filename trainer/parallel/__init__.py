"""How a model is split over processes."""
