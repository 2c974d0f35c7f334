"""What one looks at: pictures of attention maps, and a page to explore them."""
