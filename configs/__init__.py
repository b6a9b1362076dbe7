"""Run configurations: `ml_collections` files for the programs' --config flag."""
