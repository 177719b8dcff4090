"""What happens in a backward pass. Knows no layer and no quantity: rules and propagators do."""
