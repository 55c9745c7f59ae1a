from kvkit_cli.main import main

main(prog_name="kvkit")
