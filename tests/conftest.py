"""Its place puts this folder on the import path: `toys`, `tiny` and `contracts` serve the tests of all packages."""
