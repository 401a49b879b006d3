"""Plans and packages made from them."""
