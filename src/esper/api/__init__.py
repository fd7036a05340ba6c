"""The public names of esper, one file each. Import them from `esper` itself."""
