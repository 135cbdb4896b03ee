"""What programs are answered that ask about runs over the Model Context Protocol."""
