"""Generated autograd functions of several linears and of interactions: shapes, names and views for the templates."""
