"""`pipe plan` and `pipe advise`: memory and time of a recipe, before anything is rented."""
