"""The implementation of the compatibility layer; ``backpack`` holds the incumbent's names."""
