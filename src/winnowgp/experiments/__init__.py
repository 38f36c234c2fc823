"""The paper's figures, one file each: results first, pictures from the results."""
