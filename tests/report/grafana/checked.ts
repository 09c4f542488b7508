// What our dashboards are, in the types of @grafana/schema, such that an unknown or misspelt field is an error.
import type { AnnotationQuery, Dashboard, DataQuery, FieldConfig, FieldConfigSource, Panel } from '@grafana/schema';
import type {
  FieldConfig as DiagramFields,
  Options as DiagramOptions,
} from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { Options as NumberOptions } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type {
  FieldConfig as TableFields,
  Options as TableOptions,
} from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';

// JSON has the value of an enumeration's member where TypeScript wants the member.
type Plain<T> = T extends string
  ? `${T}`
  : T extends Array<infer Item>
    ? Array<Plain<Item>>
    : T extends object
      ? { [Name in keyof T]: Plain<T[Name]> }
      : T;

// The query model of the InfluxDB source is in no published package (public/app/plugins/datasource/influxdb/types.ts).
interface Influx extends DataQuery {
  datasource: { type: 'influxdb'; uid: string };
  query: string;
  rawQuery: true;
  resultFormat: 'time_series' | 'table';
  alias?: string;
}
interface InfluxMarks extends DataQuery {
  query: string;
  fromAnnotations: true;
  textColumn: string;
  tagsColumn: string;
  timeEndColumn?: string;
}

type Fields<Custom> = Omit<FieldConfigSource, 'defaults'> & {
  defaults: Omit<FieldConfig, 'custom'> & { custom?: Custom };
};
type Of<Kind extends string, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
  type: Kind;
  options: Options;
  fieldConfig: Fields<Custom>;
  targets: Influx[];
};
type Ours =
  | Of<'timeseries', DiagramOptions, DiagramFields>
  | Of<'stat', NumberOptions, never>
  | Of<'table', TableOptions, TableFields>;

export type Checked = Plain<
  Omit<Dashboard, 'panels' | 'annotations'> & { panels: Ours[]; annotations: { list: Array<AnnotationQuery<InfluxMarks>> } }
>;
