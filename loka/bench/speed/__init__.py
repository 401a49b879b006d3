"""Speed of models, regions and kernels, side by side with other libraries and the roofline."""
