"""What committed records say of a setting's accuracy, as data that ships with the package."""
