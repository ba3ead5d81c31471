"""What is said to people: wrong keywords, likely mistakes, what to install."""
