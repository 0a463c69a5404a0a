"""Small, complete models that the README, the notebooks, the demo and the tests share."""
