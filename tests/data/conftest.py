from tests.assets_from_pypi import glass_folder, smollm2_folder  # noqa: F401
