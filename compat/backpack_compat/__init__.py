"""What the compatibility layer needs beside the names of the incumbent."""
