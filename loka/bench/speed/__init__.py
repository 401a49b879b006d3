"""Steps of models, regions and kernels, timed side by side with the peers and with what bounds them."""
