import pytest
from forge_config import ConfigError, load


@pytest.fixture
def load_text(tmp_path):
    """Loads one TOML text; further files are given by name."""

    def loaded(struct, text, overrides=(), checks=(), **files):
        for name, inner in files.items():
            (tmp_path / f"{name}.toml").write_text(inner)
        path = tmp_path / "job.toml"
        path.write_text(text)
        return load(struct, path, overrides, checks)

    return loaded


@pytest.fixture
def mistakes(load_text, tmp_path):
    """The lines of the message for a configuration that must be refused, without the folder."""

    def found(*args, **files):
        with pytest.raises(ConfigError) as caught:
            load_text(*args, **files)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()[1:]

    return found
